"""The README of this folder says what belongs here."""
