"""What other engines read of an artifact: a token map for SGLang, a trimmed EAGLE-3 head for vLLM, and a generation
function for transformers alone. Each is read back by its format's rules before it is called written."""

CODE_FILE = "custom_generate/generate.py"
REQUIREMENTS_FILE = "custom_generate/requirements.txt"
CARD_FILE = "README.md"
FILES = (CODE_FILE, REQUIREMENTS_FILE, CARD_FILE)
