"""The extras of this project, each a folder that can be deleted; `quantexp.extra` says what one adds."""
