"""How `inspect` answers: sentences, tables, pages."""
