"""Before the first request: compile, capture and measure steps, and find out how much memory they need."""
