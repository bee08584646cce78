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

-- Return when a timeline is due once it has been pushed a number of times: once if none is given.
local function pushed(held, due, terms, times)
  local later = math.max(held.cool, math.min(due + terms.increment, held.last + terms.maximum))
  if (times or 1) > 1 then -- from then on it is no less than `cool`, and the rest is one push
    return math.max(held.cool, math.min(later + (times - 1) * terms.increment, held.last + terms.maximum))
  end
  return later
end

-- Open the window of a timeline, or push it, for a number of records that were added. `due` is its score in `waiting`, or
-- nil if it is in no set. Return whether it became ready, which is by the first of them.
local function open_or_push(held, due, terms, number)
  if due then
    if held.id or due <= now then
      return false -- a retry wait, or due already: nothing may push it
    end
    local later = pushed(held, due, terms, number)
    return later ~= due and place(held.key, later, true)
  end
  if held.cool > now then
    return place(held.key, pushed(held, held.cool, terms, number))
  end
  held.iteration, held.cool, held.last = 0, 0, now
  held.opening = terms.initial > 0 and now + terms.initial or 0
  due = now + terms.initial
  return place(held.key, number > 1 and due > now and pushed(held, due, terms, number - 1) or due)
end

-- Make a waiting timeline ready if its log holds `max_size` records; one that was due already keeps its place. `entry`
-- is what was added last. Return whether it is ready, and how many entries the log has.
--
-- The log is read when it has `max_size` entries. If it holds fewer records, their ids are kept from then on, or each add
-- to come would have to read it again; `counted` tells of which log, with how many entries, and how many ids there are.
local function fill(held, length, terms, due, entry)
  local size = terms.max_size
  if size == 0 or held.id or not (held.counted or length >= size) then
    uncount(held)
    return false, length
  end
  -- Needs    entries lists
  local log, ids = logs .. held.key, indexes .. held.key
  local last, entries, records = string.match(held.counted or '', '^(%d+) (%d+) (%d+)$')
  if entry and tonumber(last) == held.last and tonumber(entries) == length - 1 then
    local added = try('ZADD', ids, 0, identity(entry))
    records = type(added) == 'number' and call('ZCARD', ids) == records + added and records + added
  else
    records = nil
  end
  if not records and length < size then
    uncount(held)
    return false, length
  end
  local is_long = length > size + math.max(1, math.floor(size / 4))
  if not records or (is_long and records < size) then
    local kept = collect({}, {}, log, length)
    if not records and #kept < size then
      call('UNLINK', ids)
      for first = 1, #kept, SLICE do
        local scored = {}
        for index = first, math.min(#kept, first + SLICE - 1) do
          scored[#scored + 1] = 0
          scored[#scored + 1] = identity(kept[index])
        end
        call('ZADD', ids, unpack(scored))
      end
      call('PEXPIRE', ids, lifetime(held, terms.ttl))
    end
    records = #kept
    if is_long and records < size then
      rewrite(log, kept, records, lifetime(held, terms.ttl))
      length = records
    end
  end
  if records < size then
    held.counted = string.format('%.0f %.0f %.0f', held.last, length, records)
    return false, length
  end
  uncount(held)
  return place(held.key, math.min(due or now, now), true), length
end
