"""Whole suites of prompts over drafters, policies and temperatures, and the tables of the papers."""
