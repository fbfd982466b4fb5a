"""Programs a user of packload would write."""
