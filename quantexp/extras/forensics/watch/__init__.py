"""`quantexp watch`: a page on 127.0.0.1 that shows the runs of a folder as they run. Writes nothing into a run folder.

tail        the lines that a file has gained            curve     all losses of a run, thinned for a screen
metrics     one metrics.jsonl                           followed  one run
captures    the numerics of one captured iteration      view      the runs over each other
dossiers    what happened in which iteration            rows      runs and sweeps in words
folder      all of it, refreshed by a thread            address   the token and the port, kept for a restart
page        the page                                    server    answers its requests
connections their number and their time

The rows of the ledger come from the command line, because this room knows no launchers.
"""
