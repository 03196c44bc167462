"""Trainings that come with meshrun, each one a file that a user could have written: `meshrun run digits`."""
