"""How a prompt's embeddings are told from tokens, in graphs (`frontend/prompt_rows.py`) and requests
(`runtime/prompt_rows.py`)."""

# Row r of the table is token id FIRST_ROW_ID + r: beyond every vocabulary.
FIRST_ROW_ID = 1 << 30
# The table's name in graphs.
PROMPT_ROWS = "prompt_rows"
