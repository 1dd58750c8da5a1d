"""The arithmetic of formats that a configuration declares (`quantexp.formats.definitions`)."""
