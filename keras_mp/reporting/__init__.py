"""How reports look: tables, HTML."""
