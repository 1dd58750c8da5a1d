"""Terminal output: tables, facts, units, suggestions. Independent of experiments."""
