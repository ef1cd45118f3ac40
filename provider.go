package rdmanet

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// deviceEnv is the environment variable whose value is used in place of Config.Device.
const deviceEnv = "RDMANET_DEVICE"

// software is the device that every machine has.
var software ibv.Provider = iwarp.New(iwarp.Config{})

// softwareModes has the software device for each Config.SameHost that was asked for.
var softwareModes sync.Map

// softwareProvider returns the software device for a Config.SameHost.
func softwareProvider(sameHost string) (ibv.Provider, error) {
	if sameHost == "" {
		if _, err := iwarp.ParseSameHost(os.Getenv(iwarp.SameHostEnv)); err != nil {
			return nil, fmt.Errorf("%s %w", iwarp.SameHostEnv, err)
		}
		return software, nil
	}
	mode, err := iwarp.ParseSameHost(sameHost)
	if err != nil {
		return nil, fmt.Errorf("Config.SameHost %w", err)
	}
	p, ok := softwareModes.Load(mode)
	if !ok {
		p, _ = softwareModes.LoadOrStore(mode, iwarp.New(iwarp.Config{SameHost: mode}))
	}
	return p.(ibv.Provider), nil
}

// rdmaProviders has the providers of rdma-core by the device that they are limited to. The
// key "" is for the provider of all devices.
var rdmaProviders struct {
	sync.Mutex
	m map[string]ibv.Provider
}

// rdmaProvider returns rdma-core's provider for a device. A failure is not kept, because
// the missing module may be loaded later.
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

// entry is a kind of device in the list that Dial and Listen choose from.
type entry struct {
	name     string // name is the name of the entry in Config.Device and RDMANET_DEVICE.
	devices  bool   // devices is set if they may also name a single device, for instance "mlx5_0".
	software bool   // software is set if Config.RequireRDMA excludes the entry.

	// present reports whether the machine has such a device. It loads no library.
	present func() bool

	// open returns the provider of a device, "" for any, for a configuration.
	open func(c *Config, device string) (ibv.Provider, error)
}

// preference lists the kinds of devices, best first.
var preference = []entry{
	{name: rdmacore.Name, devices: true, present: rdmacore.Present,
		open: func(_ *Config, device string) (ibv.Provider, error) { return rdmaProvider(device) }},
	{name: iwarp.Name, software: true, present: func() bool { return true },
		open: func(c *Config, _ string) (ibv.Provider, error) { return softwareProvider(c.SameHost) }},
}

// device returns which of the entry's devices is meant by a name that was configured, ""
// for any. ok is false when the name means a device of another entry.
func (e *entry) device(want string) (device string, ok bool) {
	switch {
	case want == "" || want == e.name:
		return "", true
	case slices.ContainsFunc(preference, func(other entry) bool { return other.name == want }):
		return "", false
	}
	return want, e.devices
}

// providers returns the providers that the configuration allows, best first.
func (c *Config) providers() ([]ibv.Provider, error) {
	if c.Provider != nil {
		return []ibv.Provider{c.Provider}, nil
	}
	want, by := c.Device, "Config.Device"
	if env := os.Getenv(deviceEnv); env != "" {
		want, by = env, deviceEnv
	}
	var found []ibv.Provider
	for i := range preference {
		e := &preference[i]
		device, ok := e.device(want)
		switch {
		case !ok:
			continue
		case e.software && c.RequireRDMA:
			if want == "" {
				continue
			}
			return nil, fmt.Errorf("%s is %q, the software device, which Config.RequireRDMA forbids", by, want)
		case want == "" && !c.RequireRDMA && !e.present():
			continue
		}
		p, err := e.open(c, device)
		switch {
		case err == nil:
			c.logUnusable(p)
			found = append(found, p)
		case e.software:
			return nil, err
		case want != "":
			return nil, fmt.Errorf("%s is %q (the software device is %q, any RDMA device %q): %w",
				by, want, iwarp.Name, rdmacore.Name, err)
		case c.RequireRDMA:
			return nil, err
		default:
			c.log("no RDMA device can be used", nil, err)
		}
	}
	return found, nil
}

// logUnusable tells the logger which devices a provider has left out, and why.
func (c *Config) logUnusable(p ibv.Provider) {
	if u, ok := p.(interface{ Unusable() error }); ok {
		if err := u.Unusable(); err != nil {
			c.log("an RDMA device cannot be used", nil, err)
		}
	}
}

// rdmaPatience is how long an RDMA device may try to connect before the next entry of the
// list is tried. A host without RDMA devices drops the packets of rdma_cm without an
// answer, and rdma_cm would try for a minute.
const rdmaPatience = 2 * time.Second

// patience is how long a provider may try to connect, while others have yet to get their
// turn; 0 is as long as it takes.
func (n network) patience(p ibv.Provider) time.Duration {
	if n.hasSockets(p) {
		return 0 // Hosts answer, or a router between does.
	}
	return rdmaPatience
}

// hasSockets reports whether a provider uses sockets of package net in the network.
func (n network) hasSockets(p ibv.Provider) bool {
	attr := p.Attr()
	if n.ports == "udp" {
		return attr.UDPSockets
	}
	return attr.TCPSockets
}

// sharesTCPPorts reports whether listeners of a provider take ports of the host's TCP.
func sharesTCPPorts(p ibv.Provider) bool {
	devs, err := p.Devices()
	return err == nil && slices.ContainsFunc(devs, func(d ibv.Device) bool { return d.Attr().Caps.Has(ibv.CapTCPPorts) })
}

// inUse reports whether a port is taken.
func inUse(err error) bool { return errors.Is(err, errno.EADDRINUSE) }
