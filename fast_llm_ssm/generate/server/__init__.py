"""Generation over HTTP, as text-generation-inference and OpenAI's completions define it."""
