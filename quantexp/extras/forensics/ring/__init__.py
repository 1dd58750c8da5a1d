"""A ring of statistics in memory, the triggers that write it, and the dossiers that they leave."""
