"""Text to token ids: bytes, Hugging Face, tiktoken, SentencePiece."""
