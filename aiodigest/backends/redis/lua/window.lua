-- Shared by add and replay: opening and pushing the window in which records gather.

local function pushed(held, due, terms)
  return math.max(held.cool, math.min(due + terms.increment, held.last + terms.maximum))
end

-- `due` is the timeline's score in `waiting`, or nil if it is in no set. Answers whether it became ready.
local function open_or_push(held, due, terms)
  if due then
    if held.id or due <= now then
      return false -- a retry wait, or due already: nothing may push it
    end
    local later = pushed(held, due, terms)
    return later ~= due and place(held.key, later, 'waiting')
  end
  if held.cool > now then
    return place(held.key, pushed(held, held.cool, terms))
  end
  held.iteration, held.cool, held.last = 0, 0, now
  return place(held.key, now + terms.initial)
end

-- Whether the log holds `max_size` records. One that does not although it has more entries is compacted, or each count
-- to come would read again all the entries of ids that are added again and again. (Not at `max_size` entries: one that
-- lacks a single record would be compacted at each add.)
local function holds(held, length, terms)
  local kept = collect({}, {}, log_of(held.key), length)
  if #kept < terms.max_size and length > terms.max_size then
    rewrite(log_of(held.key), kept, #kept, lifetime(held, terms.ttl))
  end
  return #kept >= terms.max_size
end

-- Make a waiting timeline ready if it holds `max_size` records; one that was due already keeps its place.
local function fill(held, length, terms, due)
  if held.id or not holds(held, length, terms) then
    return false
  end
  return place(held.key, math.min(due or now, now), 'waiting')
end

local function parse_terms(delays, limits, own)
  local terms = parse_limits(limits)
  local initial, increment, maximum = string.match(delays, '^(%d+) (%d+) (%d+)$')
  terms.initial, terms.increment, terms.maximum = tonumber(initial), tonumber(increment), tonumber(maximum)
  terms.own = own == '1' and limits or nil
  return terms
end
