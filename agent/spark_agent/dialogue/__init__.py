"""What is said in a conversation, whatever the dialect, and how models write reasoning and tool calls. Pure."""
