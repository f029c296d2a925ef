"""Where drafting meets transformers' `generate`. The only room that uses transformers' private names."""
