-- clock: the time of a call by the shard's clock, which is the server's, and does not step back with it.
--
-- All that a shard keeps is by its own clock: the server's time and `shift`. Whoever finds the server's clock behind
-- `clock`, the newest time that was noted, adds that step to the shift. So what waits still waits as long as it would
-- have, and nothing has to be moved. Times that users give or see, and those of records, are the server's.
--
-- ARGV[2]  now (int or '', ms): the server's time, given by tests; '' for the server's clock
--
-- Needs    late

local now = tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now, micros = time[1] * 1000 + math.floor(time[2] / 1000), time[2] % 1000
end

-- Return a time that the layout keeps, 0 if there is none; another program may have written anything.
local function read_time(text)
  local time = text and tonumber(text)
  return time and time >= 0 and time < 1e14 and time % 1 == 0 and time or 0
end

shift, latest = read_time(shift), read_time(latest)
now = now + shift
local step = latest - now > STEP_MS and latest - now or 0
shift, now = shift + step, now + step
