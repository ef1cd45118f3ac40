//go:build !linux || !cgo

package rdmacore

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"

	"github.com/rdmanet/rdmanet/ibv"
)

// Provider stands for rdma-core's devices, of which there are none in this build. All its
// methods that return an error return New's.
type Provider struct{}

// New reports that there are no devices in this build. The error matches
// errors.ErrUnsupported.
func New(Config) (*Provider, error) { return nil, unavailable() }

func unavailable() error {
	if runtime.GOOS != "linux" {
		return ibv.Unsupported(Name, "rdma-core is for Linux, this is "+runtime.GOOS)
	}
	return fmt.Errorf("%w; build it with CGO_ENABLED=1 and a C compiler", ibv.Unsupported(Name, "this program was built without cgo"))
}

// Devices returns New's error.
func (p *Provider) Devices() ([]ibv.Device, error) { return nil, unavailable() }

// Unusable returns New's error.
func (p *Provider) Unusable() error { return unavailable() }

// Resolve returns New's error.
func (p *Provider) Resolve(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return nil, unavailable()
}

// Listen returns New's error.
func (p *Provider) Listen(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return nil, unavailable()
}

// BindUD returns New's error.
func (p *Provider) BindUD(context.Context, netip.AddrPort) (ibv.ID, error) {
	return nil, unavailable()
}

// ResolveUD returns New's error.
func (p *Provider) ResolveUD(context.Context, netip.AddrPort, netip.AddrPort) (ibv.ID, error) {
	return nil, unavailable()
}

// ListenUD returns New's error.
func (p *Provider) ListenUD(context.Context, netip.AddrPort, int) (ibv.Listener, error) {
	return nil, unavailable()
}
