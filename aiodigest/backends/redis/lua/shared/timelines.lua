-- timelines: load whole timelines. Their states and transitions are those of memory/backend.py.
--
-- Needs    fields

local FIELDS = {
  'end', 'token', 'done', 'attempts', 'lost', 'iteration', 'last', 'cool', 'dropped', 'open_dropped', 'id', 'part', 'cut',
  'bound', 'frozen', 'parted', 'since', 'error', 'flush', 'own', 'counted', 'opening', 'needs', 'pass',
  'next', 'bytes', 'max_bytes', 'due', plain = 24, -- after so many, what only those have that need something
}
local KNOWN = {} -- another program may have written others, of names that `held` has for what it does not store
for _, name in ipairs(FIELDS) do
  KNOWN[name] = true
end

local function thaw(key, fields)
  local held = { -- with room for what it will hold: it would have to grow four times
    key = key, stored = {}, logged = 0, opened = 0, ['end'] = 0, attempts = 0, lost = 0, iteration = 0, last = 0, cool = 0,
    dropped = 0, open_dropped = 0, part = 0, cut = 0, since = 0,
  }
  setmetatable(held, ABSENT)
  for index = 1, #fields, 2 do
    if KNOWN[fields[index]] then
      thaw_field(held, fields[index], fields[index + 1])
    end
  end
  return held
end

-- Return what is kept of a timeline beside its entries; or nil and the error of a key that cannot be read.
local function load(key)
  local fields = try('HGETALL', metas .. key)
  if fields.err then
    return nil, fields.err
  end
  local held = thaw(key, fields)
  return not held.problem and held or nil, held.problem
end

-- Do the same with the lengths of both lists, so that every key of the timeline has been read before the first write.
local function load_all(key)
  local held, problem = load(key)
  if not held then
    return nil, problem
  end
  local logged, opened = try('LLEN', logs .. key), try('LLEN', opens .. key)
  if type(logged) == 'table' or type(opened) == 'table' then
    return nil, (type(logged) == 'table' and logged or opened).err
  end
  held.logged, held.opened = logged, opened
  return held
end
