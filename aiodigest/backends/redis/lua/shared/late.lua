-- late: do nothing in a call that comes too late: its caller has given it up, and may have made others since.
--
-- ARGV[2]  timing (text): the time that tests give, '' for the server's; then, after a '<', from when on it is too late,
--          ms by the server's clock. What is left in ARGV[2] is the time of the call.
-- Returns  the error "LATE" and the server's time

local timing, micros = ARGV[2], 0 -- of the server's time, microseconds beyond its milliseconds
local given, too_late = string.match(timing, '^(%d*)<(%d+)$')
if too_late then
  local time = redis.call('TIME')
  local server_time = time[1] * 1000 + math.floor(time[2] / 1000)
  if server_time >= tonumber(too_late) then
    return redis.error_reply(string.format('LATE %.0f', server_time))
  end
  ARGV[2], micros = given ~= '' and given or server_time, given ~= '' and 0 or time[2] % 1000
end
