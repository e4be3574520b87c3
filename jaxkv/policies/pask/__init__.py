"""PASK: KV persistence decided by grammar structure (`policy`), from a frozen table (`frozen_policy`,
`policy_file`)."""
