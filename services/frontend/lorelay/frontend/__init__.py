"""OpenAI HTTP in, bus out: picks a worker for each request and turns its frames into an HTTP response."""
