"""Pure functions on ids: prefix, de-duplication, and which server holds an id."""
