"""Times to send at: calendars, hours and limits on the rate. Pure: no I/O; instants are whole milliseconds of UTC."""
