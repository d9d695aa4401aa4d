"""Proof: the demo cycle and the doctor, which let a model sleep and compare it with itself."""
