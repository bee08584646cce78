-- window: open and push the window in which records gather.
--
-- Needs    budget schedule fields hours

-- Read the terms of a policy: its delays, "initial increment maximum", and its limits, which may be the timeline's own. If
-- it has more than these, the first are JSON of all: a `rule` and what that needs, `windows` of hours, what timelines need.
local function parse_terms(delays, limits, own)
  local terms = parse_limits(limits)
  terms.dedupe, terms.max_bytes = 0, 0
  local initial, increment, maximum = string.match(delays, '^(%d+) (%d+) (%d+)$')
  if initial then
    terms.initial, terms.increment, terms.maximum = tonumber(initial), tonumber(increment), tonumber(maximum)
  else
    for name, value in pairs(cjson.decode(delays)) do
      terms[name] = value
    end
  end
  terms.own = own and limits or nil
  return terms
end

-- Return whether terms that were worked out for a time of the server's do not tell of now.
local function are_stale(terms)
  return terms.since and (now - shift < terms.since or now - shift >= terms.before)
end

-- Note what a timeline needs besides what it did.
local function need(held, needs)
  for name in string.gmatch(needs or '', '%S+') do
    if not string.find(' ' .. (held.needs or '') .. ' ', ' ' .. name .. ' ', 1, true) then
      held.needs = held.needs and held.needs .. ' ' .. name or name
    end
  end
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

-- The same for terms that have more than delays: each rule is that of timing/formula.py.

-- Return how long `count` records may wait for others.
local function price_of(held, terms, count)
  local factor = terms.randomised and math.log(1 + share_of(held.key) * 1.718281828459045) or 1
  return math.max(1, math.ceil(factor * terms.price / count))
end

local function opened_by_rule(held, terms, count)
  if terms.rule == 'debounce' then
    return now + terms.quiet
  elseif terms.rule == 'balanced' then
    return now + price_of(held, terms, count)
  elseif terms.rule == 'calendar' then
    for _, instant in ipairs(terms.instants) do
      if instant + shift > now then
        return instant + shift
      end
    end
  end
  return now + terms.initial
end

local function pushed_by_rule(held, terms, due, count)
  if terms.rule == 'debounce' then
    return now + terms.quiet
  elseif terms.rule == 'balanced' then
    return math.min(due, now + price_of(held, terms, count))
  end
  return terms.rule == 'calendar' and due or due + terms.increment
end

local function clamped(held, terms, due)
  return terms.rule == 'calendar' and due or math.max(held.cool, math.min(due, held.last + terms.maximum))
end

-- Return when the first record of a window is due, of `count` that wait.
local function opened(held, terms, count)
  local due = opened_by_rule(held, terms, count)
  if held.cool > now and terms.rule ~= 'calendar' then
    return clamped(held, terms, terms.rule == 'increment' and held.cool + terms.increment or due)
  end
  held.iteration, held.cool, held.last = 0, 0, now
  due = terms.at_once and now or due
  held.opening = terms.rule == 'increment' and due > now and due or 0
  return due
end

-- Note when the log of a timeline with an open delivery is due by its rule.
local function gather(held, terms, count)
  if terms.rule == 'increment' or (terms.rule == 'calendar' and held.next > 0) then
    return
  end
  local due = opened_by_rule(held, terms, count)
  if terms.rule == 'calendar' then -- whoever settles knows the hours, but perhaps not so far ahead
    due = within(terms, held.key, due)
  end
  held.next = terms.rule == 'balanced' and held.next > 0 and math.min(held.next, due) or due
end

-- Open the window of a timeline, or push it, record by record, for `number` of the `length` entries in its log. `settled`
-- if its due time is not to be moved. Return which of them made it ready.
local function open_or_push_each(held, due, terms, settled, number, length)
  if settled or (due and (held.id or due <= now)) then
    return gather(held, terms, length)
  end
  local waits, later = due ~= nil, due
  for step = 1, number do
    local count = length - number + step
    later = later and clamped(held, terms, pushed_by_rule(held, terms, later, count)) or opened(held, terms, count)
    later = within(terms, held.key, later)
    touch(held, math.max(later - now, 0) + terms.ttl)
    if later <= now then
      if step < number then
        gather(held, terms, length)
      end
      place(held.key, later, waits)
      return step
    end
  end
  if later ~= due then
    place(held.key, later, waits)
  end
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
  local earliest_due = within(terms, held.key, math.min(due or now, now)) -- later than now: the hours are closed
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
    if not records and (#kept < size or earliest_due > now) then
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
  if records < size or earliest_due > now then
    held.counted = string.format('%.0f %.0f %.0f', held.last, length, records)
    return records >= size and place(held.key, earliest_due, true), length
  end
  uncount(held)
  return place(held.key, earliest_due, true), length
end
