package rdmanet

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// deviceEnv overrides Config.Device.
const deviceEnv = "RDMANET_DEVICE"

// known lists the providers in the order in which they are tried.
var known = []struct {
	name string
	open func() (ibv.Provider, error)
}{
	{iwarp.Name, sync.OnceValues(func() (ibv.Provider, error) { return iwarp.New(iwarp.Config{}), nil })},
}

// providers returns the providers that the configuration allows, best first.
func (c *Config) providers() ([]ibv.Provider, error) {
	if c.Provider != nil {
		return []ibv.Provider{c.Provider}, nil
	}
	want := c.Device
	if env := os.Getenv(deviceEnv); env != "" {
		want = env
	}
	var found []ibv.Provider
	var names []string
	for _, k := range known {
		names = append(names, k.name)
		if want != "" && want != k.name {
			continue
		}
		p, err := k.open()
		if err != nil {
			return nil, err
		}
		found = append(found, p)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no device %q: there is %s (set by Config.Device or %s)", want, strings.Join(names, ", "), deviceEnv)
	}
	return found, nil
}
