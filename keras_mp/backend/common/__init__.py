"""What both backends share."""
