-- erase: drop keys of one tag, whatever they hold and whichever layout they are of.
--
-- Flags     repeatable
-- Commands  TIME UNLINK
-- Reply     int
-- KEYS[1]   layout (unused): names the slot
-- ARGV[1]   expected (unused): all layouts end
-- ARGV[2]   timing (late)
-- then      the keys
-- Returns   how many there were
--
-- Needs     late

return redis.call('UNLINK', unpack(ARGV, 3))
