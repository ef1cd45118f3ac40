package rdmanet

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// deviceEnv overrides Config.Device.
const deviceEnv = "RDMANET_DEVICE"

// software is the device that every machine has.
var software ibv.Provider = iwarp.New(iwarp.Config{})

const softwareName = iwarp.Name

// isSoftware reports whether a provider is the software device.
func isSoftware(p ibv.Provider) bool { return p.Name() == softwareName }

// rdmaProviders holds those of rdma-core by the device that they are for, ""
// for any.
var rdmaProviders struct {
	sync.Mutex
	m map[string]ibv.Provider
}

// rdmaProvider returns rdma-core's provider for a device. A failure is not
// remembered: the missing module may have been loaded since.
func rdmaProvider(device string) (ibv.Provider, error) {
	rdmaProviders.Lock()
	defer rdmaProviders.Unlock()
	if p := rdmaProviders.m[device]; p != nil {
		return p, nil
	}
	p, err := rdmacore.New(rdmacore.Config{Device: device})
	if err != nil {
		return nil, err
	}
	if _, err := p.Devices(); err != nil {
		return nil, err
	}
	if rdmaProviders.m == nil {
		rdmaProviders.m = make(map[string]ibv.Provider)
	}
	rdmaProviders.m[device] = p
	return p, nil
}

// providers returns the providers that the configuration allows, best first:
// RDMA devices, then the software device.
func (c *Config) providers() ([]ibv.Provider, error) {
	if c.Provider != nil {
		return []ibv.Provider{c.Provider}, nil
	}
	want, by := c.Device, "Config.Device"
	if env := os.Getenv(deviceEnv); env != "" {
		want, by = env, deviceEnv
	}
	switch {
	case want == iwarp.Name && c.RequireRDMA:
		return nil, fmt.Errorf("%s is %q, the software device, which Config.RequireRDMA forbids", by, want)
	case want == iwarp.Name:
		return []ibv.Provider{software}, nil
	case want != "" || c.RequireRDMA:
		device := want
		if want == rdmacore.Name {
			device = ""
		}
		p, err := rdmaProvider(device)
		if err != nil && want != "" {
			return nil, fmt.Errorf("%s is %q (the software device is %q, any RDMA device %q): %w",
				by, want, iwarp.Name, rdmacore.Name, err)
		}
		c.logUnusable(p)
		return []ibv.Provider{p}, err
	case rdmacore.Present():
		p, err := rdmaProvider("")
		if err == nil {
			c.logUnusable(p)
			return []ibv.Provider{p, software}, nil
		}
		c.log("no RDMA device can be used", nil, err)
	}
	return []ibv.Provider{software}, nil
}

// logUnusable tells the logger which devices a provider has left out, and why.
func (c *Config) logUnusable(p ibv.Provider) {
	if u, ok := p.(interface{ Unusable() error }); ok {
		if err := u.Unusable(); err != nil {
			c.log("an RDMA device cannot be used", nil, err)
		}
	}
}

// rdmaPatience is how long an RDMA device may try to connect before the
// software device gets its turn: a host that has none drops what rdma_cm sends
// without an answer, and rdma_cm goes on for a minute.
const rdmaPatience = 2 * time.Second

// sharesPorts reports whether the host's TCP ports are the provider's as well,
// so that its listener takes the software device's connections too.
func sharesPorts(p ibv.Provider) bool {
	devs, err := p.Devices()
	if err != nil {
		return false
	}
	for _, d := range devs {
		if d.Attr().Caps.Has(ibv.CapTCPPorts) {
			return true
		}
	}
	return false
}

// inUse reports whether a port is taken.
func inUse(err error) bool { return errors.Is(err, errno.EADDRINUSE) }
