"""What can go wrong while a run is saved or resumed, done to it on purpose: python -m tests.faults

Each row of the table is a kind of fault, done many times at random moments and places, which
follow from the row's name and the case's number. After each the run goes on, and must end with the
bits of an undisturbed one, or say in one line why it cannot.
"""
