-- reschedule: move the due time of a waiting timeline.
--
-- ARGV[3]  key
-- ARGV[4]  'at', 'delay' or 'policy'
-- ARGV[5]  the time or the delay, ms; for 'policy' the gap after `iteration`, ms
-- ARGV[6]  iteration for which the policy gave the gap
-- ARGV[7]  "initial increment maximum", ms
-- ARGV[8]  limits: "capacity max_size max_age ttl", ms
-- Returns  {'due', the new due time, ms}, {'outdated'} if the iteration is another, {'state'} if the timeline does
--          not wait, {'retry'} if only a given time can move it; the text of an error if the timeline is broken

local key, mode, value, iteration = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local terms = parse_terms(ARGV[7], ARGV[8], '0')
if not call('ZSCORE', waiting, key) then
  return {'state'}
end
local held, problem = load(key)
if not held then
  return problem
end

local due
if mode ~= 'policy' then
  due = math.max(now, mode == 'at' and value or now + value)
  if not held.id then
    due = math.max(held.cool, math.min(due, held.last + terms.maximum))
  end
elseif held.id then
  return {'retry'}
elseif held.iteration ~= iteration then
  return {'outdated'}
elseif held.cool > 0 then
  held.cool = held.last + value
  due = pushed(held, held.cool, terms)
else
  due = held.last + terms.initial
end
touch(held, math.max(due - now, 0) + terms.ttl) -- it must still be there when its time comes
place(key, due, 'waiting')
save(held)
finish()
return {'due', due}
