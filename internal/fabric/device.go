package fabric

import (
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
)

// Names of the provider and of its device.
const (
	providerName = "fabric"
	deviceName   = "fabric0"
)

// Limits of the device. Where RoCE has limits, they are like those.
const (
	maxQPWR       = 512
	maxSGE        = 16
	maxCQE        = 1 << 16
	maxMR         = 1 << 20
	maxMessage    = 1<<31 - 1
	maxRdAtom     = 16
	maxInline     = 256
	maxPrivate    = 56
	maxInlineUD   = 64
	maxPrivateUD  = 136
	maxGroups     = 1 << 10
	maxOthers     = 1 << 16 // queue pairs, completion queues, domains, address handles
	maxRegionSize = 1 << 40
)

// device implements ibv.Device.
type device struct{ f *Fabric }

func (d *device) Name() string { return deviceName }

func (d *device) Attr() ibv.DeviceAttr {
	caps := ibv.CapSendInvalidate | ibv.CapSendImm | ibv.CapSolicited | ibv.CapQPRegion | ibv.CapEmptyReads |
		ibv.CapUD | ibv.CapMulticast
	if !d.f.pins {
		caps |= ibv.CapOnDemandPaging | ibv.CapWaitReceives
	}
	return ibv.DeviceAttr{
		Transport:        ibv.TransportRoCE,
		Caps:             caps,
		Ports:            d.f.ports(),
		MaxQP:            maxOthers,
		MaxQPWR:          maxQPWR,
		MaxSGE:           maxSGE,
		MaxSGERead:       maxSGE,
		MaxInline:        maxInline,
		MaxCQ:            maxOthers,
		MaxCQE:           maxCQE,
		MaxMR:            maxMR,
		MaxPD:            maxOthers,
		MaxMRSize:        maxRegionSize,
		MaxMessageSize:   maxMessage,
		MaxQPRdAtom:      maxRdAtom,
		MaxQPInitRdAtom:  maxRdAtom,
		MaxPrivateData:   maxPrivate,
		MaxAH:            maxOthers,
		MaxInlineUD:      maxInlineUD,
		MaxPrivateDataUD: maxPrivateUD,
		MaxMcastGrp:      maxGroups,
		MaxMcastQPAttach: maxGroups,
	}
}

func (d *device) Port(n int) (ibv.PortAttr, error) {
	if n < 1 || n > d.f.ports() {
		return ibv.PortAttr{}, fmt.Errorf("%s: port %d: %w", deviceName, n, syscall.EINVAL)
	}
	attr := ibv.PortAttr{State: ibv.PortActive, ActiveMTU: d.f.pathMTU(), NetDev: "fab0"}
	for _, a := range d.f.addrs {
		attr.GIDs = append(attr.GIDs, ibv.GIDFromAddr(a.WithZone("")))
	}
	return attr, nil
}

// checkCap reports what of a queue pair's capacities is more than the device can do.
func checkCap(c ibv.QPCap, inline int) error {
	switch {
	case c.MaxSendWR < 0 || c.MaxRecvWR < 0 || c.MaxSendSGE < 0 || c.MaxRecvSGE < 0 || c.MaxInline < 0:
		return fmt.Errorf("negative capacity: %w", syscall.EINVAL)
	case c.MaxSendWR > maxQPWR || c.MaxRecvWR > maxQPWR:
		return fmt.Errorf("%d sends and %d receives (limit %d each): %w", c.MaxSendWR, c.MaxRecvWR, maxQPWR, ibv.ErrLimit)
	case c.MaxSendSGE > maxSGE || c.MaxRecvSGE > maxSGE:
		return fmt.Errorf("%d and %d elements a request (limit %d): %w", c.MaxSendSGE, c.MaxRecvSGE, maxSGE, ibv.ErrLimit)
	case c.MaxInline > inline:
		return fmt.Errorf("%d inline bytes (limit %d): %w", c.MaxInline, inline, ibv.ErrLimit)
	}
	return nil
}
