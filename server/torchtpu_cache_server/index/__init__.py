"""Indexes: what the service knows of its bucket without asking it; losing one costs speed only."""
