-- flush: make a timeline ready now, or after the delivery under way.
--
-- ARGV[3]  key
-- Returns  1 if it holds records, else 0

local key = ARGV[3]
local state, due = state_of(key)
if state == 'waiting' then
  place(key, math.min(due, now), state)
elseif state == 'leased' and call('EXISTS', meta_of(key)) == 1 then
  call('HSET', meta_of(key), 'flush', '1')
end
finish()
return state and 1 or 0
