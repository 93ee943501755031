"""Plans for people: tables and annotated graphs."""
