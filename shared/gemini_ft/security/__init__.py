"""What keeps strangers out: secrets in files, encryption, and who may listen where (docs/security.md)."""
