"""Reading and writing of tables, rows and documents; splits and audits."""
