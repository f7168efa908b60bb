"""The server's side after training: updates are checked and averaged, and the server takes its step."""
