-- items: read the items of a call, and answer each.
--
-- ARGV[3]  nonce (text): names what the items are to name
-- ARGV[4]  first (int): number of the first item in the caller's request, from 1
-- then     the items, of any number of arguments each
--
-- Needs    budget counters schedule

local nonce, first = ARGV[3], tonumber(ARGV[4])
local cursor = 5

local function next_argument()
  cursor = cursor + 1
  return ARGV[cursor - 1]
end

local function next_number()
  return tonumber(next_argument())
end

local function next_flag()
  return next_argument() == '1'
end

-- Read a number of identities, and these, as a set; nil if the number is -1, for all records.
local function next_ids()
  local length = next_number()
  if length < 0 then
    return nil
  end
  local ids = {}
  for _ = 1, length do
    ids[next_argument()] = true
  end
  return ids
end

-- Return where the next arguments begin, and go on behind so many of them.
local function skip(number)
  cursor = cursor + number
  return cursor - number
end

local item_number = first - 1 -- of the item that is being answered

-- Return the name for what an item makes.
local function new_name()
  return nonce .. '-' .. item_number
end

-- Answer item after item, until enough has been read; end the script.
local function answer_each(next_item, transition)
  local answers = {}
  while cursor <= #ARGV and scanned < SLICE do
    item_number = item_number + 1
    answers[#answers + 1] = transition(next_item())
  end
  write_counts()
  wake()
  return answers
end
