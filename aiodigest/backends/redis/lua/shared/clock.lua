-- clock: the time of a call.
--
-- ARGV[2]  now (int or '', ms): given by tests; '' for the server's clock

local now = tonumber(ARGV[2])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
