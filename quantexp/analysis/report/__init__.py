"""report.html: a run or a sweep in one file that works offline.

Everything that comes from a run folder is data: it is escaped by the template or read by the page from a JSON block,
and the page's own policy lets no other script run and nothing be loaded.
"""
