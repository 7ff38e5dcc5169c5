"""Providers that hand the paged ops to attention libraries. Each library is imported when it is first used."""
