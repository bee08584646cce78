-- window: open and push the window in which records gather.
--
-- Needs    budget schedule fields

-- Read the terms of a policy: its delays, "initial increment maximum", and its limits, which may be the timeline's own.
local function parse_terms(delays, limits, own)
  local terms = parse_limits(limits)
  local initial, increment, maximum = string.match(delays, '^(%d+) (%d+) (%d+)$')
  terms.initial, terms.increment, terms.maximum = tonumber(initial), tonumber(increment), tonumber(maximum)
  terms.own = own and limits or nil
  return terms
end

local function pushed(held, due, terms)
  return math.max(held.cool, math.min(due + terms.increment, held.last + terms.maximum))
end

-- Open the window of a timeline, or push it. `due` is its score in `waiting`, or nil if it is in no set. Return whether
-- it became ready.
local function open_or_push(held, due, terms)
  if due then
    if held.id or due <= now then
      return false -- a retry wait, or due already: nothing may push it
    end
    local later = pushed(held, due, terms)
    return later ~= due and place(held.key, later, true)
  end
  if held.cool > now then
    return place(held.key, pushed(held, held.cool, terms))
  end
  held.iteration, held.cool, held.last = 0, 0, now
  return place(held.key, now + terms.initial)
end

-- Make a waiting timeline ready if its log holds `max_size` records; one that was due already keeps its place. Return
-- whether it is ready.
local function fill(held, length, terms, due)
  if held.id then
    return false
  end
  -- Needs    entries lists
  local log = logs .. held.key
  local kept = collect({}, {}, log, length)
  -- One that does not although it has more entries is compacted, or each count to come would read again all the entries
  -- of ids that are added again and again. (Not at `max_size` entries: one that lacks a single record would be compacted
  -- at each add.)
  if #kept < terms.max_size and length > terms.max_size then
    rewrite(log, kept, #kept, lifetime(held, terms.ttl))
  end
  return #kept >= terms.max_size and place(held.key, math.min(due or now, now), true)
end
