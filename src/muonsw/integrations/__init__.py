"""Adapters for training frameworks. Import each by name: `import muonsw` needs only torch."""
