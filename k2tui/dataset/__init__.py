"""The training data: prompts in, `tokenized_data.jsonl` out, and what people ask of such a file. Knows no torch and no server's inside."""
