"""Files in and out: tables, rows, documents, and their division."""
