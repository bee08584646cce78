-- counters: what happened in a shard, counted in its layout.

local counted = {}

local function count(name, number)
  counted[name] = (counted[name] or 0) + number
end

local function write_counts()
  for name, number in pairs(counted) do
    if number ~= 0 then
      try('HINCRBY', layout, name, number) -- fails where another program wrote no number; all else has been done
    end
  end
end
