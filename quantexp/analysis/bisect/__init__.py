"""What `quantexp bisect` finds: delta debugging, the signs of trouble, tables and figures."""
