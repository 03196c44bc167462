"""The key-value store on which ranks meet: torch's clients speak to it, and nobody but this user's processes can."""
