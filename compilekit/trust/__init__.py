"""Who made an artifact: signatures, and places that nobody else can write.

Modules: `signature` (sign and verify; needs the package cryptography), `places` (owners
and modes up the tree), `policy` (what a start demands, and opening under it).

A start imports this only where a digest or a signature is demanded.
"""
